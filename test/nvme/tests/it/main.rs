//! Integration tests, one program: a module a subject.

mod auth;
mod common;
mod endings;
mod limits;
mod malformed;
mod refused;
mod namespace_states;
mod serving;
mod subsystems;
mod tls;
