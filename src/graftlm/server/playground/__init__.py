"""The page at `/`: prompts answered side by side, adapters, and what the server is doing. Plain files for browsers,
which use the routes that every client uses."""
