"""The kit itself."""
