"""Tables of published runs that come with Shardwise."""
