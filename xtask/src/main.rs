//! One door to every chore.
fn main() {}
