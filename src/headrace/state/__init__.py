"""State as a resource: weights, KV, the journal, memory."""
