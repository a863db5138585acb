"""Session, Run and Step on a channel: the agent's side, the client's side, and codecs. Usable without any flow."""
