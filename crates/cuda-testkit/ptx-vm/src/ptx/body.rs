//! The body of a kernel: declarations, labels, and instructions one by one.

use std::collections::HashMap;

use crate::instruction::{Instruction, Op};
use crate::ptx::decode::decode;
use crate::ptx::error::{ParseError, Refusal};
use crate::ptx::names::{Names, Variable};
use crate::ptx::operands::Operands;
use crate::ptx::statements::{Form, Statement};

/// Dynamic shared memory begins at a multiple of this, or of its variable's alignment if that is larger.
const DYNAMIC_SHARED_ALIGN: usize = 16;

/// Shared memory: variables of fixed size one after the other, then the dynamic part.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedLayout {
    addresses: HashMap<String, u64>,
    static_bytes: usize,
    /// Variables of the dynamic part. They all begin where it begins.
    dynamic: Vec<String>,
    dynamic_align: usize,
}

impl SharedLayout {
    /// The text begins behind `.shared`.
    pub(super) fn declare(&mut self, text: &str, is_extern: bool) -> Result<(), Refusal> {
        let variable = Variable::parse(text, &[])?;
        match variable.bytes {
            Some(bytes) if !is_extern && variable.initial.is_none() => {
                let at = self.static_bytes.next_multiple_of(variable.align);
                self.addresses.insert(variable.name.to_owned(), at as u64);
                self.static_bytes = at + bytes;
            }
            None if is_extern => {
                self.dynamic.push(variable.name.to_owned());
                self.dynamic_align = self.dynamic_align.max(variable.align);
            }
            _ => return Err(Refusal::Directive),
        }
        Ok(())
    }

    fn dynamic_at(&self) -> usize {
        self.static_bytes
            .next_multiple_of(self.dynamic_align.max(DYNAMIC_SHARED_ALIGN))
    }

    fn all_addresses(&self) -> impl Iterator<Item = (String, u64)> {
        let dynamic_at = self.dynamic_at() as u64;
        let dynamic = self.dynamic.iter().map(move |name| (name.clone(), dynamic_at));
        self.addresses
            .iter()
            .map(|(name, at)| (name.clone(), *at))
            .chain(dynamic)
    }
}

pub(super) struct Body {
    pub(super) code: Vec<Instruction>,
    pub(super) registers: usize,
    pub(super) carry: u32,
    pub(super) static_shared_bytes: usize,
    pub(super) dynamic_shared_at: usize,
    pub(super) local_bytes: usize,
}

/// `variables` are the module's and the parameters.
pub(super) fn read_body(
    body: &[Statement<'_>],
    mut variables: HashMap<String, u64>,
    mut shared: SharedLayout,
) -> Result<Body, ParseError> {
    refuse_calls(body)?;
    // The dynamic part begins behind all variables, so they are placed before an instruction names one.
    for statement in body {
        if let Form::Directive(text) = statement.form
            && let Some(declared) = text.strip_prefix(".shared")
        {
            shared
                .declare(declared, false)
                .map_err(|refusal| statement.refuse(refusal))?;
        }
    }
    variables.extend(shared.all_addresses());
    let mut reader = Reader::new(Names::new(variables));
    for statement in body {
        reader
            .statement(statement)
            .map_err(|refusal| statement.refuse(refusal))?;
    }
    reader.code.push(Instruction {
        guard: None,
        op: Op::Exit,
        line: reader.source_line,
    });
    reader.find_labels(body)?;
    Ok(Body {
        code: reader.code,
        registers: reader.names.register_count(),
        carry: Names::CARRY,
        static_shared_bytes: shared.static_bytes,
        dynamic_shared_at: shared.dynamic_at(),
        local_bytes: reader.local_bytes,
    })
}

/// A call comes with declarations of its parameters. The refusal has to name what is called, so it is looked for first.
fn refuse_calls(body: &[Statement<'_>]) -> Result<(), ParseError> {
    for statement in body {
        let Form::Instruction(text) = statement.form else {
            continue;
        };
        let (_, unguarded) = split_guard(text);
        if unguarded.split(['.', ' ', '\t', '\n']).next() != Some("call") {
            continue;
        }
        // `call.uni (results), name, (parameters)`
        let operands = unguarded
            .split_once(char::is_whitespace)
            .map_or("", |(_, operands)| operands.trim());
        let after_results = operands.split_once(')').filter(|_| operands.starts_with('('));
        let callee = after_results.map_or(operands, |(_, rest)| rest.trim_start_matches([',', ' ', '\n', '\t']));
        let name = callee.split([',', ' ', '\n', '\t']).next().unwrap_or("").to_owned();
        return Err(statement.refuse(Refusal::Call(name)));
    }
    Ok(())
}

/// `@p`, `@!p` or nothing, and the rest.
fn split_guard(text: &str) -> (Option<&str>, &str) {
    match text
        .strip_prefix('@')
        .and_then(|guarded| guarded.split_once(char::is_whitespace))
    {
        Some((guard, rest)) => (Some(guard), rest.trim_start()),
        None => (None, text),
    }
}

/// A branch whose labels are not known yet.
struct Jump {
    instruction: usize,
    /// Of the body.
    statement: usize,
    scopes: Vec<u32>,
    labels: Vec<String>,
}

struct Reader {
    names: Names,
    code: Vec<Instruction>,
    /// By scope and name.
    labels: HashMap<(u32, String), usize>,
    last_label: Option<String>,
    jumps: Vec<Jump>,
    /// Of the CUDA source; 0: not known.
    source_line: u32,
    local_bytes: usize,
    statements_read: usize,
}

impl Reader {
    fn new(names: Names) -> Self {
        Self {
            names,
            code: Vec::new(),
            labels: HashMap::new(),
            last_label: None,
            jumps: Vec::new(),
            source_line: 0,
            local_bytes: 0,
            statements_read: 0,
        }
    }

    fn statement(&mut self, statement: &Statement<'_>) -> Result<(), Refusal> {
        self.statements_read += 1;
        match statement.form {
            Form::Open => self.names.open(),
            Form::Close => {
                if !self.names.close() {
                    return Err(Refusal::Unterminated);
                }
            }
            Form::Label(label) => {
                let scope = self.names.scope_ids().first().copied().unwrap_or(0);
                self.labels.insert((scope, label.to_owned()), self.code.len());
                self.last_label = Some(label.to_owned());
            }
            Form::Directive(text) => return self.directive(text),
            Form::Instruction(text) => return self.instruction(text, statement.line),
            Form::Head(_) => return Err(Refusal::Directive),
        }
        Ok(())
    }

    fn directive(&mut self, text: &str) -> Result<(), Refusal> {
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        match word {
            // `.loc file line column`
            ".loc" => {
                let line = rest.split_whitespace().nth(1).and_then(|line| line.parse().ok());
                self.source_line = line.ok_or(Refusal::Directive)?;
            }
            ".reg" => self.names.declare_registers(text)?,
            ".local" => {
                let variable = Variable::parse(rest, &[])?;
                let at = self.local_bytes.next_multiple_of(variable.align);
                self.local_bytes = at + variable.bytes.ok_or(Refusal::Directive)?;
                self.names.variables.insert(variable.name.to_owned(), at as u64);
            }
            ".branchtargets" => {
                let list = self.last_label.clone().ok_or(Refusal::Directive)?;
                let labels = rest.split(',').map(|label| label.trim().to_owned()).collect();
                self.names.label_lists.insert(list, labels);
            }
            // Shared variables have been placed already. A pragma is a hint for `ptxas`.
            ".shared" | ".pragma" => {}
            _ => return Err(Refusal::Directive),
        }
        Ok(())
    }

    fn instruction(&mut self, text: &str, ptx_line: u32) -> Result<(), Refusal> {
        let (guard, text) = split_guard(text);
        let mut operands = Operands::new(&self.names, text);
        let guard = match guard {
            None => None,
            Some(guard) => {
                let (name, runs_if) = guard.strip_prefix('!').map_or((guard, true), |name| (name, false));
                Some((operands.named_register(name)?.index, runs_if))
            }
        };
        let op = decode(&mut operands)?;
        let labels = std::mem::take(&mut operands.labels);
        if !labels.is_empty() {
            let (instruction, scopes) = (self.code.len(), self.names.scope_ids());
            self.jumps.push(Jump {
                instruction,
                statement: self.statements_read - 1,
                scopes,
                labels,
            });
        }
        let line = if self.source_line == 0 {
            ptx_line
        } else {
            self.source_line
        };
        self.code.push(Instruction { guard, op, line });
        Ok(())
    }

    /// Puts the places of labels into the branches that name them.
    fn find_labels(&mut self, body: &[Statement<'_>]) -> Result<(), ParseError> {
        for jump in &self.jumps {
            let place = |label: &String| {
                let found = jump
                    .scopes
                    .iter()
                    .find_map(|scope| self.labels.get(&(*scope, label.clone())));
                found
                    .copied()
                    .ok_or_else(|| body[jump.statement].refuse(Refusal::Label(label.clone())))
            };
            let places: Vec<usize> = jump.labels.iter().map(place).collect::<Result<_, _>>()?;
            match &mut self.code[jump.instruction].op {
                Op::Branch { to } => *to = places[0],
                Op::BranchTable { to, .. } => *to = places.into_boxed_slice(),
                _ => {}
            }
        }
        Ok(())
    }
}
