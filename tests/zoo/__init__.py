"""A zoo: models of foreign construction, to which every technique is applied unchanged."""
