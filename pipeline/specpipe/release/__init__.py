"""From a built pair to production: described, signed, published, fetched, promoted, compared."""
