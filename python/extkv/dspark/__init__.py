"""DSpark in the engine: drafting several tokens per step and verifying them without loss."""
