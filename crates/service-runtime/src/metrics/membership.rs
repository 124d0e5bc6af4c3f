//! The state of a process in etcd. With embedded membership the process always counts as registered and not stale.

use etcd_membership::RegistrationHealth;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::table;

/// Clones share the gauges.
#[derive(Clone, Debug, Default)]
pub struct MembershipGauges {
    registered: Gauge,
    view_stale: Gauge,
}

impl MembershipGauges {
    /// Makes and registers both gauges, with the values of embedded membership.
    pub fn register(registry: &mut Registry) -> Self {
        let gauges = Self::default();
        gauges.registered.set(1);
        table::MEMBERSHIP_REGISTERED.register(registry, gauges.registered.clone());
        table::MEMBERSHIP_VIEW_STALE.register(registry, gauges.view_stale.clone());
        gauges
    }

    pub fn set(&self, health: &RegistrationHealth, is_stale: bool) {
        let is_registered = matches!(health, RegistrationHealth::Registered { .. });
        self.registered.set(i64::from(is_registered));
        self.view_stale.set(i64::from(is_stale));
    }
}
