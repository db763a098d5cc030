"""Results of a trained model: tables, pictures and the report."""
