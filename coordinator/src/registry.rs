//! This coordinator in etcd: its own entry, the other entries, and the page about them. It never decides which node serves:
//! nodes find this coordinator by its entry, and the status streams decide the rest. While etcd is away it only shows that.

use std::borrow::Cow;
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use etcd_membership::{
    AddressError, CoordinatorEntry, Directory, DirectoryConfig, EtcdAddress, EtcdTrouble, NodeEntry, Registration,
    RegistrationConfig, RegistrationHealth, View, first_answer,
};
use identity::TlsConfig;
use serde::{Deserialize, Serialize, Serializer};
use service_runtime::membership::of_process;
use service_runtime::metrics::membership::MembershipGauges;
use service_runtime::serve;
use service_runtime::shutdown::Shutdown;
use serving_core::ids::{NodeEpoch, NodeId};
use serving_core::node::NodeState;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How nodes and coordinators find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MembershipKind {
    /// Nodes get the addresses of their coordinators from their settings.
    Embedded,
    Etcd(EtcdAddress),
}

impl MembershipKind {
    /// As a process with these settings asks it.
    ///
    /// # Errors
    /// It may not ask that etcd in plain text, or has no authority for it.
    pub fn used_by(&self, tls: &TlsConfig) -> Result<Self, AddressError> {
        Ok(match self {
            Self::Embedded => Self::Embedded,
            Self::Etcd(address) => Self::Etcd(address.clone().used_by(of_process(tls))?),
        })
    }

    /// Waits until etcd answers, if it is needed. It is for whoever starts processes and can say so before they do.
    ///
    /// # Errors
    /// Why etcd does not answer within that time.
    pub async fn first_answer(&self, within: Duration) -> Result<(), EtcdTrouble> {
        match self {
            Self::Embedded => Ok(()),
            Self::Etcd(address) => first_answer(address, within).await,
        }
    }
}

impl FromStr for MembershipKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "embedded" {
            return Ok(Self::Embedded);
        }
        let address = text.parse().map_err(|error| format!("{error}; or write embedded"))?;
        Ok(Self::Etcd(address))
    }
}

/// Never shows a password.
impl fmt::Display for MembershipKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded => f.write_str("embedded"),
            Self::Etcd(address) => address.fmt(f),
        }
    }
}

impl Serialize for MembershipKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The facts for the entry.
#[derive(Clone, Debug)]
pub(crate) struct Facts<'a> {
    pub id: NodeId,
    pub control: SocketAddr,
    pub control_advertise: Option<&'a str>,
    pub http: SocketAddr,
}

/// The state of etcd now, for `/admin/cluster`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct RegistryPage {
    pub kind: Cow<'static, str>,
    /// The address without its password; `None` when embedded.
    pub etcd: Option<String>,
    pub registered: bool,
    pub is_stale: bool,
    /// Names in etcd, and those that vanished because of trouble in etcd.
    pub nodes: Vec<String>,
    pub coordinators: Vec<String>,
    /// The number of records that could not be read.
    pub skipped_records: u64,
    pub trouble: Option<String>,
}

impl Default for RegistryPage {
    fn default() -> Self {
        Self {
            kind: "embedded".into(),
            etcd: None,
            registered: true,
            is_stale: false,
            nodes: Vec::new(),
            coordinators: Vec::new(),
            skipped_records: 0,
            trouble: None,
        }
    }
}

/// The source of the page. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct RegistryView(Option<Arc<Views>>);

#[derive(Debug)]
struct Views {
    address: EtcdAddress,
    health: watch::Receiver<RegistrationHealth>,
    nodes: watch::Receiver<View<NodeEntry>>,
    coordinators: watch::Receiver<View<CoordinatorEntry>>,
}

impl RegistryView {
    pub fn page(&self) -> RegistryPage {
        let Some(views) = &self.0 else {
            return RegistryPage::default();
        };
        let health = views.health.borrow().clone();
        let (nodes, coordinators) = (views.nodes.borrow(), views.coordinators.borrow());
        let trouble = match &health {
            RegistrationHealth::Retrying { why, .. } => Some(why.to_string()),
            RegistrationHealth::Fenced { by_epoch } => Some(format!("fenced by epoch {by_epoch}")),
            RegistrationHealth::Registered { .. } => nodes.trouble.as_ref().map(ToString::to_string),
        };
        RegistryPage {
            kind: "etcd".into(),
            etcd: Some(views.address.to_string()),
            registered: matches!(health, RegistrationHealth::Registered { .. }),
            is_stale: nodes.is_stale,
            nodes: nodes.members.keys().cloned().collect(),
            coordinators: coordinators.members.keys().cloned().collect(),
            skipped_records: nodes.skipped + coordinators.skipped,
            trouble,
        }
    }
}

/// Keeps the entry, and stops the process when a later life of this coordinator's name shows up.
pub(crate) struct Registry {
    registration: Arc<Registration<CoordinatorEntry>>,
    directories: (Directory<NodeEntry>, Directory<CoordinatorEntry>),
    follower: JoinHandle<()>,
    view: RegistryView,
}

impl Registry {
    /// # Errors
    /// An address that nobody can dial, or an entry that other processes would skip.
    pub(crate) fn start(
        address: &EtcdAddress,
        facts: Facts<'_>,
        (gauges, shutdown): (MembershipGauges, Shutdown),
    ) -> anyhow::Result<Self> {
        let control_address = serve::reachable_address(facts.control, facts.control_advertise)
            .context("nodes have no address of the control port")?;
        let host = control_address.rsplit_once(':').map_or("", |(host, _)| host);
        let http_address = match facts.http.ip().is_unspecified() {
            true => format!("{host}:{}", facts.http.port()),
            false => facts.http.to_string(),
        };
        let entry = CoordinatorEntry {
            id: facts.id,
            control_address,
            http_address,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            state: NodeState::Ready,
        };
        let lease_ttl = address.lease_ttl();
        let registration = Registration::start(address.clone(), RegistrationConfig { lease_ttl }, entry)
            .context("this coordinator cannot be registered; fix its --name")?;
        let registration = Arc::new(registration);
        let directories = (
            Directory::start(address.clone(), DirectoryConfig::for_lease(lease_ttl)),
            Directory::start(address.clone(), DirectoryConfig::for_lease(lease_ttl)),
        );
        let views = Views {
            address: address.clone(),
            health: registration.health(),
            nodes: directories.0.view(),
            coordinators: directories.1.view(),
        };
        let follower = Follower {
            health: registration.health(),
            nodes: directories.0.view(),
            registration: registration.clone(),
            gauges,
            shutdown,
        };
        Ok(Self {
            registration,
            directories,
            follower: tokio::spawn(follower.run()),
            view: RegistryView(Some(Arc::new(views))),
        })
    }

    pub(crate) fn view(&self) -> RegistryView {
        self.view.clone()
    }

    /// Removes the entry. Returns the epoch that took the name over, if one did.
    pub(crate) async fn leave(self) -> Option<NodeEpoch> {
        self.follower.abort();
        let _ = self.follower.await;
        drop(self.directories);
        let health = self.registration.health();
        if let Some(registration) = Arc::into_inner(self.registration) {
            registration.leave().await;
        }
        match *health.borrow() {
            RegistrationHealth::Fenced { by_epoch } => Some(by_epoch),
            _ => None,
        }
    }
}

struct Follower {
    health: watch::Receiver<RegistrationHealth>,
    nodes: watch::Receiver<View<NodeEntry>>,
    registration: Arc<Registration<CoordinatorEntry>>,
    gauges: MembershipGauges,
    shutdown: Shutdown,
}

impl Follower {
    async fn run(mut self) {
        loop {
            let health = self.health.borrow_and_update().clone();
            let is_stale = self.nodes.borrow_and_update().is_stale;
            self.gauges.set(&health, is_stale);
            if matches!(health, RegistrationHealth::Fenced { .. }) {
                self.shutdown.request();
            }
            if self.shutdown.is_requested() {
                self.registration.update(NodeState::Draining);
            }
            tokio::select! {
                Ok(()) = self.health.changed() => {}
                Ok(()) = self.nodes.changed() => {}
                () = self.shutdown.requested(), if !self.shutdown.is_requested() => {}
                else => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_and_etcd_are_told_apart_and_no_password_is_shown() {
        assert_eq!("embedded".parse(), Ok(MembershipKind::Embedded));
        let etcd: MembershipKind = "etcd://u:secret@h:1/c".parse().expect("an address");
        assert_eq!(etcd.to_string(), "etcd://u:***@h:1/c");
        let error = "etc".parse::<MembershipKind>().expect_err("neither");
        assert!(error.contains("etcd://") && error.contains("embedded"), "{error}");
    }
}
