//! Operations on gateway groups.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink};
use crate::api;
use crate::engine::Engine;
use crate::failure::Result;
use crate::spec::{GroupSpec, uri_encode};

/// Path of the group that the daemon is in.
const OWN: &str = "/v1/gateway-group";

fn path(spec: &GroupSpec) -> String {
    format!("/v1/gateway-groups/{}/{}", uri_encode(&spec.pool, false), uri_encode(&spec.group, false))
}

/// Creates a gateway group.
pub struct CreateGatewayGroup {
    /// Spec of the group.
    pub spec: GroupSpec,
    /// Lease in milliseconds.
    pub lease_ms: Option<u32>,
    /// Set if volumes are moved by themselves.
    pub rebalance: bool,
}

impl Operation for CreateGatewayGroup {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let GroupSpec { pool, group } = self.spec.clone();
        let body = api::NewGatewayGroup { pool, name: group, lease_ms: self.lease_ms, rebalance: self.rebalance };
        HttpRoute::new("POST", "/v1/gateway-groups").json(&body)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.create_gateway_group(&self.spec, self.lease_ms, self.rebalance).await
    }
}

/// Removes a gateway group without members and volumes.
pub struct RemoveGatewayGroup(pub GroupSpec);

impl Operation for RemoveGatewayGroup {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.remove_gateway_group(&self.0).await
    }
}

/// Shows a gateway group; without a name, the one that the daemon is in.
pub struct GetGatewayGroup(pub Option<GroupSpec>);

impl Operation for GetGatewayGroup {
    type Reply = api::GatewayGroupStatus;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", self.0.as_ref().map_or_else(|| OWN.into(), path))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.gateway_group_status(self.0.as_ref()).await
    }
}

/// Makes the daemon a member of a gateway group.
pub struct JoinGatewayGroup(pub GroupSpec);

impl Operation for JoinGatewayGroup {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let GroupSpec { pool, group } = self.0.clone();
        HttpRoute::new("PUT", OWN).json(&api::GatewayGroupName { pool, name: group })
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.join_gateway_group(&self.0).await
    }
}

/// Lets the daemon leave its gateway group.
pub struct LeaveGatewayGroup;

impl Operation for LeaveGatewayGroup {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", OWN)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.leave_gateway_group().await
    }
}

/// Begins or ends draining a member.
pub struct DrainGatewayMember(pub api::DrainGateway);

impl Operation for DrainGatewayMember {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", format!("{OWN}/drain")).json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.drain_gateway(&self.0).await
    }
}

/// Sets the weight of a member.
pub struct SetGatewayWeight(pub api::GatewayWeight);

impl Operation for SetGatewayWeight {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("PUT", format!("{OWN}/weight")).json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.set_gateway_weight(&self.0).await
    }
}

/// Changes the policy of the daemon's group.
pub struct SetGatewayPolicy(pub api::GatewayGroupPolicy);

impl Operation for SetGatewayPolicy {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("PUT", format!("{OWN}/policy")).json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.set_gateway_policy(&self.0).await
    }
}

/// Moves volumes of a group so that its members are loaded alike.
pub struct RebalanceGateways(pub api::RebalanceGatewaysRequest);

impl Operation for RebalanceGateways {
    type Reply = Vec<api::GatewayMove>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", format!("{OWN}/rebalance")).json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<Self::Reply> {
        engine.rebalance_gateways(self.0.dry_run, |done, total| progress.report(done, total)).await
    }
}
