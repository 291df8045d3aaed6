"""OpenAI's API over HTTP: check and queue requests, stream tokens back as text, and show what the engine does.

body --> fields --> Asked --> FairQueue --> EngineLoop's thread --> engine
                                                 |
client <-- events <-- Written (text) <-- Ticket <-+
"""
