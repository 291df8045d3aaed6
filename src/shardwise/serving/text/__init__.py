"""Text to tokens and back: tokenizers, chat templates, tool calls, stop strings, schemas."""
