"""Controllers: found by patterns or by dataflow, checked against look-alikes, rewritten into placeholders."""
