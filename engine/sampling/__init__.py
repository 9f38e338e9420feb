"""Choosing the next tokens, and reporting how probable they were."""
