"""What happened, or is predicted to happen: events, attribution of time and memory, drawings, exports."""
