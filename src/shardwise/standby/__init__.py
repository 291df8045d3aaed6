"""Standby processes with all imports of a rank done, from which restarted ranks are forked."""
