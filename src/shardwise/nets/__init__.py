"""The torch modules we ship: one transformer for many families, and Hugging Face weights into and out of it."""
