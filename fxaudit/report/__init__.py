"""Results as JSON and as text. Nothing here computes a number."""
