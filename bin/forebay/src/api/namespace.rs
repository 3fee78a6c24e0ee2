//! Namespaces of a pool in the control API.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Name of a namespace, as `rbd namespace ls` writes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NamespaceName {
    /// Name of the namespace.
    pub name: String,
}
