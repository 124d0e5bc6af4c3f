//! Users and TLS: what etcd lets in, what it keeps out, and what the process is told.

use etcd_client::{Permission, PermissionType};
use etcd_membership::{EtcdTrouble, RegistrationHealth};

use crate::etcd_process::Etcd;
use crate::kit::{directory, is_whole, register, registered, see};

fn is_not_allowed(health: &RegistrationHealth) -> bool {
    matches!(
        health,
        RegistrationHealth::Retrying {
            why: EtcdTrouble::NotAllowed { .. },
            ..
        }
    )
}

#[tokio::test]
async fn a_user_of_its_own_cluster_gets_in_and_others_are_told_why_not() {
    let etcd = Etcd::start().await;
    let client = etcd.client().await;
    let mut auth = client.auth_client();
    auth.user_add("root", "secret", None).await.expect("root");
    auth.role_add("root").await.expect("role");
    auth.user_grant_role("root", "root").await.expect("grant");
    auth.user_add("baton", "p@ss", None).await.expect("user");
    auth.role_add("test-cluster").await.expect("role");
    let own = Permission::new(PermissionType::Readwrite, "/baton/test/").with_prefix();
    auth.role_grant_permission("test-cluster", own)
        .await
        .expect("permission");
    auth.user_grant_role("baton", "test-cluster").await.expect("grant");
    auth.auth_enable().await.expect("enabled");

    let address = |credentials: &str, cluster: &str| format!("etcd://{credentials}@127.0.0.1:{}/{cluster}", etcd.port);
    let registration = register(&address("baton:p%40ss", "test"), "c0", 1);
    let directory = directory(&address("baton:p%40ss", "test"));
    registered(&registration).await;
    see(&mut directory.view(), "registered", |view| is_whole(view, &["c0"])).await;
    registration.leave().await;
    see(&mut directory.view(), "and gone", |view| view.members.is_empty()).await;

    for credentials in [
        address("baton:wrong", "test"),
        address("baton:p%40ss", "other"),
        etcd.address(),
    ] {
        let refused = register(&credentials, "c1", 1);
        see(&mut refused.health(), "refused", is_not_allowed).await;
    }
}

/// Of this test; `tls/README.md` says how they were made.
fn tls_file(name: &str) -> String {
    format!("{}/tests/against_etcd/tls/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[tokio::test]
async fn tls_needs_the_right_authority_and_a_client_certificate() {
    let (ca, certificate, key) = (tls_file("ca.pem"), tls_file("server.pem"), tls_file("server.key"));
    let files = [
        "--cert-file",
        &certificate,
        "--key-file",
        &key,
        "--trusted-ca-file",
        &ca,
        "--client-cert-auth",
    ];
    let etcd = Etcd::start_with(&files).await;
    let address = |query: &str| format!("etcds://127.0.0.1:{}/test?{query}", etcd.port);
    let identity = format!("cert={}&key={}", tls_file("client.pem"), tls_file("client.key"));
    let good = address(&format!("ca={ca}&{identity}"));
    let registration = register(&good, "c0", 1);
    let directory = directory(&good);
    registered(&registration).await;
    see(&mut directory.view(), "registered", |view| is_whole(view, &["c0"])).await;

    let is_tls = |health: &RegistrationHealth| {
        matches!(
            health,
            RegistrationHealth::Retrying {
                why: EtcdTrouble::Tls { .. },
                ..
            }
        )
    };
    let no_certificate = address(&format!("ca={ca}"));
    let other_authority = address(&format!("ca={}&{identity}", tls_file("other-ca.pem")));
    for bad in [no_certificate, other_authority] {
        let refused = register(&bad, "c1", 1);
        see(&mut refused.health(), "refused", is_tls).await;
    }
    let plain = register(&etcd.address(), "c1", 1);
    let is_told = |health: &RegistrationHealth| match health {
        RegistrationHealth::Retrying { why, .. } => *why != EtcdTrouble::NotYet,
        _ => false,
    };
    see(&mut plain.health(), "no TLS, no entry", is_told).await;
    let view = directory.view().borrow().clone();
    assert!(is_whole(&view, &["c0"]), "{view:?}");
}
