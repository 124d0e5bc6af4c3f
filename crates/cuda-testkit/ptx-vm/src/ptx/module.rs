//! A module: its variables, and its kernels by name.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::ptx::body::{SharedLayout, read_body};
use crate::ptx::error::{ParseError, Refusal};
use crate::ptx::image::Image;
use crate::ptx::kernel::{Head, Kernel};
use crate::ptx::names::Variable;
use crate::ptx::statements::{Form, Statement, statements, without_comments};

/// Kernels by name.
#[derive(Clone, Debug, Default)]
pub struct Module {
    kernels: BTreeMap<String, Arc<Kernel>>,
}

impl Module {
    /// # Errors
    /// The PTX has something that the interpreter does not know. The whole module is refused.
    pub fn parse(ptx: &str) -> Result<Module, ParseError> {
        let text = without_comments(ptx);
        let all = statements(&text)?;
        let mut reader = Reader::default();
        let mut kernels = Vec::new();
        let mut at = 0;
        while let Some(statement) = all.get(at) {
            at += 1;
            match statement.form {
                Form::Head(text) => {
                    let head = Head::parse(text).map_err(|refusal| statement.refuse(refusal))?;
                    let body = body_of(&all[at..], statement)?;
                    at += body.len() + 2;
                    if let Some(head) = head {
                        kernels.push(reader.kernel(head, body, statement)?);
                    }
                }
                Form::Directive(text) => reader.directive(text).map_err(|refusal| statement.refuse(refusal))?,
                _ => return Err(statement.refuse(Refusal::Directive)),
            }
        }
        let image: Arc<[u8]> = reader.image.bytes.into();
        let with_image = |mut kernel: Kernel| {
            kernel.image = Arc::clone(&image);
            (kernel.name.clone(), Arc::new(kernel))
        };
        Ok(Module {
            kernels: kernels.into_iter().map(with_image).collect(),
        })
    }

    pub fn kernel(&self, name: &str) -> Option<Arc<Kernel>> {
        self.kernels.get(name).cloned()
    }

    /// Sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }
}

/// The statements between the braces that follow a head.
fn body_of<'s, 't>(rest: &'s [Statement<'t>], head: &Statement<'_>) -> Result<&'s [Statement<'t>], ParseError> {
    let mut depth = 0_usize;
    for (at, statement) in rest.iter().enumerate() {
        match statement.form {
            Form::Open => depth += 1,
            Form::Close => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return rest.get(1..at).ok_or_else(|| head.refuse(Refusal::Unterminated));
        }
    }
    Err(head.refuse(Refusal::Unterminated))
}

/// What has been declared so far.
#[derive(Debug, Default)]
struct Reader {
    /// Addresses of variables in global and constant memory.
    variables: HashMap<String, u64>,
    image: Image,
    shared: SharedLayout,
}

impl Reader {
    fn directive(&mut self, text: &str) -> Result<(), Refusal> {
        let is_linkage = |word: &str| matches!(word, ".visible" | ".weak" | ".extern");
        let mut rest = text;
        let mut is_extern = false;
        loop {
            let (word, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            let after = after.trim_start();
            match word {
                ".version" | ".target" | ".address_size" | ".file" | ".pragma" => return Ok(()),
                // A declaration of a function: only a call of it would matter, and that is refused.
                ".func" | ".entry" => return Ok(()),
                ".shared" => return self.shared.declare(after, is_extern),
                ".global" | ".const" if !is_extern => {
                    let variable = Variable::parse(after, &[])?;
                    let address = self.image.add(&variable)?;
                    self.variables.insert(variable.name.to_owned(), address);
                    return Ok(());
                }
                _ if is_linkage(word) => {
                    is_extern |= word == ".extern";
                    rest = after;
                }
                _ => return Err(Refusal::Directive),
            }
        }
    }

    fn kernel(&self, head: Head<'_>, body: &[Statement<'_>], statement: &Statement<'_>) -> Result<Kernel, ParseError> {
        let mut variables = self.variables.clone();
        let places = head.param_names.iter().zip(&head.params);
        variables.extend(places.map(|(name, param)| ((*name).to_owned(), param.offset as u64)));
        let body = read_body(body, variables, self.shared.clone())?;
        Ok(Kernel {
            name: head.name.to_owned(),
            params: head.params,
            param_bytes: head.param_bytes,
            max_threads: head.max_threads,
            static_shared_bytes: body.static_shared_bytes,
            local_bytes: body.local_bytes,
            required_block: head.required_block,
            dynamic_shared_at: body.dynamic_shared_at,
            registers: body.registers,
            carry: body.carry,
            code: body.code,
            image: Arc::from([]),
            line: statement.line,
        })
    }
}
