"""Language models built from memory blocks."""
