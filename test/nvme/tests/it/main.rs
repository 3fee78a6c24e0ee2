//! Integration tests, one program: a module a subject.

mod auth;
mod common;
mod endings;
mod limits;
mod malformed;
mod namespace_states;
mod refused;
mod serving;
mod subsystems;
mod tls;
