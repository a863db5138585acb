"""Sessions: the document, the store protocol and the stores."""
