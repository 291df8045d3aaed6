"""What happened, or is predicted to happen: events, where the time and the memory went, drawings, exports."""
