//! Whom a client of the command line trusts behind `https://`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use hyper_rustls::ConfigBuilderExt as _;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore, crypto};

use crate::exit::{Exit, WithExit as _};

/// The file of the authority, where `--ca` is not given.
pub(crate) const CA_VARIABLE: &str = "BATON_CA";

/// For every verb that talks to a server.
#[derive(Clone, Debug, Default, Args)]
pub struct TrustArgs {
    /// File of the authority, in PEM, whose certificate a server at https:// has to have [default: any that this machine trusts].
    #[arg(long, env = CA_VARIABLE, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub ca: Option<PathBuf>,
}

/// # Errors
/// `ca` cannot be read (usage), or the machine has no authorities.
pub(crate) fn config(scheme: Option<&str>, ca: Option<&Path>) -> anyhow::Result<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions()?;
    let builder = match (scheme, ca) {
        (Some("https"), Some(file)) => builder.with_root_certificates(authorities(file).exit(Exit::Usage)?),
        (Some("https"), None) => builder.with_native_roots().context(
            "this machine has no list of authorities (Debian, Ubuntu: apt-get install ca-certificates); name the server's in a file with --ca or BATON_CA",
        )?,
        // Without TLS no authorities are needed: the machine may have none.
        _ => builder.with_root_certificates(RootCertStore::empty()),
    };
    Ok(builder.with_no_client_auth())
}

fn authorities(file: &Path) -> anyhow::Result<RootCertStore> {
    let unusable = || format!("the file of the authority, {}, cannot be used", file.display());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).with_context(unusable)? {
        roots.add(certificate.with_context(unusable)?).with_context(unusable)?;
    }
    anyhow::ensure!(!roots.is_empty(), "{}: it holds no certificate in PEM", unusable());
    Ok(roots)
}
