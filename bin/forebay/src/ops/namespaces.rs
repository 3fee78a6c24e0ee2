//! Operations on the namespaces of a pool.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink};
use crate::api::NamespaceName;
use crate::engine::Engine;
use crate::failure::Result;
use crate::spec::{NamespaceSpec, uri_encode};

fn namespaces_path(pool: &str) -> String {
    format!("/v1/namespaces/{}", uri_encode(pool, false))
}

/// Lists the namespaces of a pool.
pub struct ListNamespaces {
    /// Pool name.
    pub pool: String,
}

impl Operation for ListNamespaces {
    type Reply = Vec<NamespaceName>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", namespaces_path(&self.pool))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_namespaces(&self.pool).await
    }
}

/// Creates a namespace.
pub struct CreateNamespace(pub NamespaceSpec);

impl Operation for CreateNamespace {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let name = NamespaceName { name: self.0.namespace.clone() };
        HttpRoute::new("POST", namespaces_path(&self.0.pool)).json(&name)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.create_namespace(&self.0).await
    }
}

/// Removes an empty namespace.
pub struct RemoveNamespace(pub NamespaceSpec);

impl Operation for RemoveNamespace {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let path = format!("{}/{}", namespaces_path(&self.0.pool), uri_encode(&self.0.namespace, false));
        HttpRoute::new("DELETE", path)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.remove_namespace(&self.0).await
    }
}
