"""State as a resource: weights, KV, files that appear whole, memory."""
