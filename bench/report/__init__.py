"""From results.json to the reports: terminal, Markdown, one HTML page, and CSV."""
