"""`locret-serve`: contexts read in bounded memory and asked over HTTP, as OpenAI's clients ask."""
