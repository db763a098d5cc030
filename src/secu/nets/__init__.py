"""Layer 3: views → unit embeddings, through a backbone, a projection and an optional prediction MLP."""
