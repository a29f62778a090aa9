"""Messages, config and sockets shared by the processes of a server and its clients."""
