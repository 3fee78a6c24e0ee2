//! Operations on the namespaces of a pool.

use std::rc::Rc;

use forebay_block::ErrorKind;
use forebay_image::Images;

use super::Engine;
use crate::api::NamespaceName;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::NamespaceSpec;

impl Engine {
    async fn namespaces_of(&self, pool: &str) -> Result<Rc<Images>> {
        Ok(Images::of(&self.pool(pool).await?))
    }

    /// Lists the namespaces of a pool, in order.
    pub async fn list_namespaces(&self, pool: &str) -> Result<Vec<NamespaceName>> {
        let listed = self.namespaces_of(pool).await?.namespaces().await;
        let listed = listed.map_err(|error| self.pool_failure(error, pool))?;
        Ok(listed.into_iter().map(|name| NamespaceName { name }).collect())
    }

    /// Creates a namespace.
    pub async fn create_namespace(&self, spec: &NamespaceSpec) -> Result<()> {
        spec.check_new()?;
        let created = self.namespaces_of(&spec.pool).await?.create_namespace(&spec.namespace).await;
        created.map_err(|error| namespace_failure(error, spec))?;
        tracing::info!(namespace = %spec, "a namespace was created");
        Ok(())
    }

    /// Removes an empty namespace.
    pub async fn remove_namespace(&self, spec: &NamespaceSpec) -> Result<()> {
        let removed = self.namespaces_of(&spec.pool).await?.remove_namespace(&spec.namespace).await;
        removed.map_err(|error| namespace_failure(error, spec))?;
        tracing::info!(namespace = %spec, "a namespace was removed");
        Ok(())
    }
}

/// Explains an error about a namespace to the user.
fn namespace_failure(error: forebay_block::Error, spec: &NamespaceSpec) -> Failure {
    match error.kind() {
        ErrorKind::NotFound => Failure::new(FailureKind::NotFound, format!("there is no namespace {spec}"))
            .hint(format!("'forebay namespace ls {}' lists those that there are", spec.pool)),
        ErrorKind::Exists => Failure::new(FailureKind::Exists, format!("the namespace {spec} exists already")),
        ErrorKind::Busy => Failure::from(error).hint(format!(
            "remove them first: 'forebay ls {spec}', 'forebay trash ls {spec}' and 'forebay group ls {spec}' list them"
        )),
        _ => Failure::from(error).context(format_args!("the namespace {spec}")),
    }
}
