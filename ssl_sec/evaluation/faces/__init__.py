"""What embeddings of faces are worth: verification, identification, templates, videos."""
