//! What both drivers of the operating system share: opening, listening, closing.
