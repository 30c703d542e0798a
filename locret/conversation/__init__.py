"""Reading a text and talking about it: contexts, chats, and how turns become tokens."""
