"""Device code that drafting and verification share: draft logits, decisions, residual draws."""
