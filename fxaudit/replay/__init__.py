"""Recording coefficients to disk and replaying the frozen model with them."""
