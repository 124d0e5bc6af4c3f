//! Which role may call what.

use thiserror::Error;

use crate::name::{PeerName, PeerRole};

/// Who made a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// This process has no certificate and asks for none.
    PlainText,
    /// The connection is encrypted, and the caller showed no certificate.
    Nobody,
    /// The names of the caller's certificate, which the cluster's authority signed. All are of this process's cluster.
    Named(Vec<PeerName>),
}

/// Why a call is refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Refused {
    #[error("{path} needs a certificate of the cluster")]
    NoCertificate { path: String },
    #[error("{path} is not for {caller}")]
    NotForTheRole { path: String, caller: String },
    #[error("the certificate is of {caller}, and the call says that it is {said}")]
    AnotherName { caller: String, said: String },
}

/// Who may call a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum For {
    Everybody,
    Roles(&'static [PeerRole]),
}

/// The table. What is not in it is for nobody. `/health` and `/ready` are for probes, which have no certificate, and say nothing
/// but the state.
fn who_may_call(path: &str) -> For {
    use PeerRole::{Coordinator, Decode, Operator, Prefill};
    match path {
        "/health" | "/ready" => return For::Everybody,
        "/metrics" => return For::Roles(&[Coordinator, Operator]),
        _ => {}
    }
    let service = path.strip_prefix('/').and_then(|path| path.split_once('/'));
    For::Roles(match service.map(|(service, _)| service) {
        Some("baton.v1.MembershipService") => &[Prefill, Decode],
        Some("baton.v1.DecodeService" | "baton.v1.PrefillService" | "baton.v1.CacheService") => &[Coordinator],
        Some("baton.v1.HandoffService") => &[Prefill],
        Some("grpc.health.v1.Health" | "admin") => &[Coordinator, Operator],
        _ => &[],
    })
}

/// # Errors
/// The caller may not call this path.
pub fn check_call(caller: &Caller, path: &str) -> Result<(), Refused> {
    let roles = match (caller, who_may_call(path)) {
        (Caller::PlainText, _) | (_, For::Everybody) => return Ok(()),
        (_, For::Roles(roles)) => roles,
    };
    // The path is the caller's text.
    let path: String = path.chars().take(80).filter(|c| !c.is_control()).collect();
    match caller {
        Caller::Named(names) if names.iter().any(|name| roles.contains(&name.role)) => Ok(()),
        Caller::Named(names) => Err(Refused::NotForTheRole {
            path,
            caller: words(names),
        }),
        _ => Err(Refused::NoCertificate { path }),
    }
}

impl Caller {
    /// For the log.
    pub fn words(&self) -> String {
        match self {
            Self::PlainText => "somebody".to_owned(),
            Self::Nobody => words(&[]),
            Self::Named(names) => words(names),
        }
    }

    /// A call says which process makes it: the certificate has to say the same.
    ///
    /// # Errors
    /// [`Refused::AnotherName`].
    pub fn check_name(&self, role: PeerRole, name: &str) -> Result<(), Refused> {
        let names = match self {
            Self::PlainText => return Ok(()),
            Self::Nobody => &[][..],
            Self::Named(names) => names,
        };
        match names.iter().any(|known| known.role == role && known.name == name) {
            true => Ok(()),
            false => Err(Refused::AnotherName {
                caller: words(names),
                said: format!("{role} node {name}"),
            }),
        }
    }
}

fn words(names: &[PeerName]) -> String {
    let names: Vec<String> = names.iter().map(PeerName::to_string).collect();
    match names.is_empty() {
        true => "somebody without a certificate".to_owned(),
        false => names.join(" and "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(role: PeerRole) -> Caller {
        Caller::Named(vec![PeerName {
            cluster: "demo".into(),
            role,
            name: "x-0".into(),
        }])
    }

    #[test]
    fn a_path_is_for_the_roles_of_the_table_and_what_is_not_in_it_for_nobody() {
        let table = [
            ("/baton.v1.MembershipService/Join", "prefill decode"),
            ("/baton.v1.MembershipService/ReadClock", "prefill decode"),
            ("/baton.v1.DecodeService/Open", "coordinator"),
            ("/baton.v1.PrefillService/Prefill", "coordinator"),
            ("/baton.v1.CacheService/ResetPrefixCache", "coordinator"),
            ("/baton.v1.HandoffService/Push", "prefill"),
            ("/grpc.health.v1.Health/Check", "coordinator operator"),
            ("/metrics", "coordinator operator"),
            ("/admin/spans/1", "coordinator operator"),
            ("/", ""),
            ("", ""),
            ("/metrics/", ""),
            ("/baton.v1.HandoffServiceX/Push", ""),
            ("//baton.v1.HandoffService/Push", ""),
        ];
        for (path, roles) in table {
            for role in PeerRole::ALL {
                let is_for = roles.split(' ').any(|known| known == role.name());
                assert_eq!(check_call(&named(role), path).is_ok(), is_for, "{path} {role}");
            }
            assert!(check_call(&Caller::Nobody, path).is_err(), "{path}");
            assert!(check_call(&Caller::Named(Vec::new()), path).is_err(), "{path}");
            assert!(check_call(&Caller::PlainText, path).is_ok(), "{path}");
        }
        for path in ["/health", "/ready"] {
            assert!(check_call(&Caller::Nobody, path).is_ok(), "{path}");
        }
    }

    #[test]
    fn a_caller_is_who_its_certificate_names() {
        let caller = named(PeerRole::Prefill);
        assert_eq!(caller.check_name(PeerRole::Prefill, "x-0"), Ok(()));
        for (role, name) in [
            (PeerRole::Decode, "x-0"),
            (PeerRole::Prefill, "x-1"),
            (PeerRole::Prefill, ""),
        ] {
            assert!(caller.check_name(role, name).is_err(), "{role} {name}");
        }
        assert!(Caller::Nobody.check_name(PeerRole::Prefill, "x-0").is_err());
        assert!(Caller::PlainText.check_name(PeerRole::Prefill, "x-0").is_ok());
    }
}
