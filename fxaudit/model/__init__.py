"""The front door: what the user names becomes a `Subject`, and a `Subject` a `TracedModel`."""
