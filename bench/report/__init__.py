"""From results.json to tables for the terminal and for Markdown."""
