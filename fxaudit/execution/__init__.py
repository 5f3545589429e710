"""What a graph executes: counts now; export, proof and profile as they are built."""
