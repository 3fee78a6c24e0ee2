//! Integration tests, one program: a module a subject.

mod block_oracle;
mod net;
mod sizes;
mod world;
