"""An HTTP server with OpenAI's interface around one engine; an extra: `pip install 'pilotfish[server]'`."""
