"""What it runs on: devices, links, topology, measured tables."""
