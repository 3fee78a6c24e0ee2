//! Integration tests, one program: a module a subject.

mod common;
mod malformed;
mod serving;
mod tls;
