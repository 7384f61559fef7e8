"""Generated wire code, never edited: `make proto` writes it from proto/deeplink/v1."""
