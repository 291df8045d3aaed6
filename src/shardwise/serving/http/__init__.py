"""OpenAI's API over HTTP: requests checked and queued, tokens streamed back as text, and what the engine does shown.

body --> fields --> Asked --> FairQueue --> EngineLoop's thread --> engine
                                                 |
client <-- events <-- Written (text) <-- Ticket <-+
"""
