//! Integration tests, one program: a module a subject.

mod common;
mod malformed;
mod resuming;
mod serving;
mod tls;
