//! The dependency direction: which crate may import which, read from every `Cargo.toml`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use toml::Table;

use crate::rules::Violation;

/// Folder, level, and the crates of ours it may import. A crate that is not here has no place in the design yet:
/// give it one in ARCHITECTURE.md and here.
const ALLOWED: &[(&str, &[&str])] = &[
    ("crates/serving-core", &[]),
    ("proto", &["serving-core"]),
    ("crates/model-files", &["serving-core"]),
    ("crates/etcd-membership", &["serving-core"]),
    ("crates/workload", &["serving-core"]),
    ("crates/grammar", &["serving-core"]),
    ("crates/identity", &[]),
    (
        "crates/service-runtime",
        &["serving-core", "proto", "etcd-membership", "identity"],
    ),
    ("crates/engine", &["serving-core", "model-files"]),
    ("crates/cuda", &[]),
    ("crates/kv-transfer", &["serving-core", "proto", "cuda", "identity"]),
    ("crates/cuda-engine", &["serving-core", "model-files", "engine", "cuda"]),
    ("crates/cuda-testkit/ptx-vm", &[]),
    ("crates/cuda-testkit/false-cuda", &["ptx-vm"]),
    ("crates/cuda-testkit/false-cublaslt", &[]),
    ("crates/cuda-testkit/false-nccl", &[]),
    ("crates/simulator", &["serving-core", "workload"]),
    (
        "coordinator",
        &[
            "serving-core",
            "proto",
            "model-files",
            "grammar",
            "etcd-membership",
            "workload",
            "identity",
            "service-runtime",
        ],
    ),
    (
        "crates/node",
        &[
            "serving-core",
            "proto",
            "model-files",
            "grammar",
            "identity",
            "service-runtime",
            "engine",
            "cuda-engine",
            "kv-transfer",
        ],
    ),
    ("prefill-node", ROLE),
    ("decode-node", ROLE),
    (
        "crates/cli",
        &[
            "serving-core",
            "proto",
            "model-files",
            "workload",
            "identity",
            "service-runtime",
            "engine",
            "kv-transfer",
            "cuda",
            "cuda-engine",
            "simulator",
            "coordinator",
            "node",
            "prefill-node",
            "decode-node",
        ],
    ),
    (
        "integration-tests",
        &[
            "cli",
            "serving-core",
            "proto",
            "model-files",
            "workload",
            "engine",
            "etcd-membership",
            "identity",
            "service-runtime",
        ],
    ),
    (
        "fuzz",
        &[
            "coordinator",
            "decode-node",
            "node",
            "serving-core",
            "proto",
            "model-files",
            "workload",
            "kv-transfer",
            "etcd-membership",
            "identity",
            "service-runtime",
        ],
    ),
];

const ROLE: &[&str] = &[
    "serving-core",
    "proto",
    "service-runtime",
    "engine",
    "kv-transfer",
    "node",
];

/// External crates the core may use; dev-dependencies may add test tools.
const CORE_EXTERNAL: &[&str] = &["serde", "thiserror"];
const CORE_EXTERNAL_DEV: &[&str] = &["proptest"];

/// One `Cargo.toml` of a member.
#[derive(Debug)]
pub struct Manifest {
    pub dir: String,
    pub name: String,
    pub dependencies: Vec<Dependency>,
}

#[derive(Debug)]
pub struct Dependency {
    pub name: String,
    pub is_dev: bool,
    pub is_from_workspace: bool,
}

impl Manifest {
    pub fn parse(dir: &str, text: &str) -> Self {
        let manifest: Table = text.parse().unwrap_or_else(|error| panic!("{dir}/Cargo.toml: {error}"));
        let name = manifest["package"]["name"].as_str().unwrap_or_default().to_owned();
        let mut dependencies = Vec::new();
        for section in ["dependencies", "build-dependencies", "dev-dependencies"] {
            for (name, value) in manifest
                .get(section)
                .and_then(toml::Value::as_table)
                .into_iter()
                .flatten()
            {
                dependencies.push(Dependency {
                    name: name.clone(),
                    is_dev: section == "dev-dependencies",
                    is_from_workspace: value.get("workspace").and_then(toml::Value::as_bool) == Some(true),
                });
            }
        }
        Self {
            dir: dir.to_owned(),
            name,
            dependencies,
        }
    }

    pub fn read_members(root: &Path) -> Vec<Self> {
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let workspace: Table = read(&root.join("Cargo.toml"))
            .parse()
            .expect("the root Cargo.toml is TOML");
        let members = workspace["workspace"]["members"].as_array().expect("members is a list");
        members
            .iter()
            .filter_map(toml::Value::as_str)
            .map(|dir| Self::parse(dir, &read(&root.join(dir).join("Cargo.toml"))))
            .collect()
    }
}

/// Checks every edge. `manifests` are all members, so that "ours" is known.
pub fn violations(manifests: &[Manifest]) -> Vec<Violation> {
    let ours: BTreeSet<&str> = manifests.iter().map(|manifest| manifest.name.as_str()).collect();
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let mut found = Vec::new();
    for manifest in manifests {
        let dir = &manifest.dir;
        if dir.rsplit('/').next() != Some(&manifest.name) {
            found.push(format!(
                "{dir}/Cargo.toml: the package is called {}, its folder is not",
                manifest.name
            ));
        }
        let Some(allowed) = allowed.get(dir.as_str()) else {
            found.push(format!(
                "{dir}: a crate without a place in the layering (tests/tidy/layering.rs)"
            ));
            continue;
        };
        for dependency in &manifest.dependencies {
            let name = dependency.name.as_str();
            if ours.contains(name) && !allowed.contains(&name) {
                found.push(format!("{dir}/Cargo.toml: {} must not import {name}", manifest.name));
            }
            if !dependency.is_from_workspace {
                found.push(format!(
                    "{dir}/Cargo.toml: {name} must be `workspace = true` (one feature set per dependency)"
                ));
            }
            let is_core_tool = CORE_EXTERNAL.contains(&name) || dependency.is_dev && CORE_EXTERNAL_DEV.contains(&name);
            if manifest.name == "serving-core" && !is_core_tool {
                found.push(format!(
                    "{dir}/Cargo.toml: serving-core uses {CORE_EXTERNAL:?} only, not {name}"
                ));
            }
        }
    }
    found
}
