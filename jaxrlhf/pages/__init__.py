"""Pages for a browser, and fragments of HTML for notebooks: graphs, plans, timelines, forecasts, curves, runs."""
