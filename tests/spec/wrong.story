# Each case is a file of right/ with one edit, and what is said of it.
# REWRITE=1 pytest tests/spec/test_wrong.py writes the indented lines anew; read the diff.

## Words

basic: `phasesync: 1` -> `phasesync: 2`
  ! 1:12: the version of the language cannot be '2'; write `1`
basic: `phasesync: 1\n` -> ``
  ! 1:1: the file has no 'phasesync'; add `phasesync: 1`
basic: `protocol: basic\n` -> ``
  ! 1:1: the file has no 'protocol'; add `protocol: NAME`
basic: `protocol: basic` -> `protocol: 1st`
  ! 2:11: the protocol's name is '1st'; write a letter, then letters, digits and _ (64 at most)
basic: `protocol: basic` -> `protocol: [basic]`
  ! 2:11: the protocol's name is a list; write a letter, then letters, digits and _ (64 at most)
basic: `protocol: basic` -> `protocol: basic\nprotocol: basic`
  ! 3:1: key 'protocol' is given twice in the file; keep one of them
basic: `protocol: basic` -> `protocol: basic\nversion: 3`
  ! 3:1: unknown key 'version' in the file; keys are: phasesync, protocol, summary, options, groups, roles, resources, never, always, agree, monotone, phases, fences, transitions, recover
basic: `summary: The leader` -> `summary: |\n  The leader\n `
  ! 3:10: summary is not one line of printable text; write one plain line
basic: `summary:` -> `sumary:`
  ! 3:1: unknown key 'sumary' in the file; did you mean 'summary'?
basic: `roles:\n` -> `roles: {}\nr:\n`
  ! 5:25: unknown role 'trainer'; there are no roles
  ! 6:8: roles is empty; write `roles: {NAME: ...}`, or drop it
  ! 7:1: unknown key 'r' in the file; keys are: phasesync, protocol, summary, options, groups, roles, resources, never, always, agree, monotone, phases, fences, transitions, recover
  ! 11:21: unknown role 'trainer'; there are no roles
  ! 12:21: unknown role 'trainer'; there are no roles
  ! 13:21: unknown role 'engine'; there are no roles
basic: `phases:` -> `phase:`
  ! 1:1: the file has no 'phases'; add `phases: [...]`
  ! 16:1: unknown key 'phase' in the file; did you mean 'phases'?

## Options

basic: `{type: int, default: 2, min: 1}` -> `int`
  ! 4:25: option 'replica_size' is 'int', not a mapping; write {type: bool, default: true}
basic: `type: int,` -> `type: integer,`
  ! 4:32: type of option 'replica_size' cannot be 'integer'; did you mean 'int'?
basic: `type: int,` -> `type: bool,`
  ! 4:47: default of option 'replica_size' is '2'; write true or false
  ! 4:55: 'min' is for type int; option 'replica_size' is of type bool
basic: `type: int, ` -> ``
  ! 4:25: option 'replica_size' has no 'type'; add `type: bool`
basic: `default: 2, ` -> ``
  ! 4:25: option 'replica_size' has no 'default'; add `default: ...`
basic: `default: 2` -> `default: two`
  ! 4:46: default of option 'replica_size' is 'two'; write a whole number, such as 2
basic: `default: 2` -> `default: "2"`
  ! 4:46: default of option 'replica_size' is '2'; write a whole number, such as 2
basic: `default: 2` -> `default: 0`
  ! 4:46: default 0 is less than min 1; default to 1, or lower min
basic: `min: 1` -> `min: 1, max: 0`
  ! 4:62: max 0 is less than min 1; swap them
basic: `min: 1` -> `min: 1, max: 1`
  ! 4:46: default 2 is more than max 1; default to 1, or raise max
basic: `min: 1` -> `least: 1`
  ! 4:49: unknown key 'least' in option 'replica_size'; keys are: type, default, min, max, of
basic: `, min: 1` -> ``
  ! 5:40: size of group 'replica' may be less than 1; give replica_size min: 1
basic: `min: 1}` -> `min: 1}, fast: {type: bool, default: yes}`
  ! 4:86: default of option 'fast' is 'yes'; write true
basic: `min: 1}` -> `min: 1}, fast: {type: bool, default: false}`
  ? 4:58: option 'fast' changes nothing; use it, or drop it [idle]
basic: `min: 1}` -> `min: 1}, in: {type: bool, default: true}`
  ! 4:58: 'in' means something else here; give the option another name
basic: `min: 1}` -> `min: 1}, how: {type: enum, of: [], default: a}`
  ! 4:80: 'of' of option 'how' is empty; write [WORD, WORD], or drop it
basic: `min: 1}` -> `min: 1}, how: {type: enum, of: [a, a], default: a}`
  ! 4:84: 'a' is given twice; keep one of them
basic: `min: 1}` -> `min: 1}, how: {type: enum, of: [a, b], default: c}`
  ! 4:97: default of option 'how' cannot be 'c'; choices are: a, b
basic: `min: 1}` -> `min: 1}, how: {type: enum, default: c}`
  ! 4:63: option 'how' has no choices; write `of: [WORD, WORD]`
colocated: `of: [replica, world], default` -> `of: [replica, host], default`
  ! 45:12: scope of fence 'ready_for_weights' is option 'fence_scope', which holds no scope; an option that is a scope is an enum of: world, replica
  ! 61:12: scope of fence 'memory_released' is option 'fence_scope', which holds no scope; an option that is a scope is an enum of: world, replica
colocated: `param_offload:     {` -> `replica: {type: bool, default: true}\n  param_offload: {`
  ! 13:3: option 'replica' is also a group; rename one, so that conditions are clear [reference]
colocated: `free_cache_engine: {` -> `moon: {type: enum, of: [param_offload, x], default: x}\n  free_cache_engine: {`
  ! 13:3: option 'param_offload' is also a choice of 'moon'; rename one, so that conditions are clear [reference]
colocated: `fence_scope:       {` -> `world:       {`
  ! 15:3: 'world' means something else here; give the option another name
  ! 45:12: scope of fence 'ready_for_weights' cannot be 'fence_scope'; without another group under `groups`, scopes are: world, replica
  ! 61:12: scope of fence 'memory_released' cannot be 'fence_scope'; without another group under `groups`, scopes are: world, replica

## Conditions

colocated: `when: param_offload, outside` -> `when: param_ofload, outside`
  ! 41:54: when: no option is called 'param_ofload'; did you mean 'param_offload'?
colocated: `when: param_offload, outside` -> `when: not, outside`
  ! 41:57: when does not parse: ends too early; conditions are made of options, and, or, not, ==, !=, <, <=, >, >=, in [..]
colocated: `when: param_offload, outside` -> `when: param_offload and, outside`
  ! 41:71: when does not parse: ends too early; conditions are made of options, and, or, not, ==, !=, <, <=, >, >=, in [..]
colocated: `when: param_offload, outside` -> `when: (param_offload, outside`
  ! 41:68: when does not parse: expected ')'; conditions are made of options, and, or, not, ==, !=, <, <=, >, >=, in [..]
colocated: `when: param_offload, outside` -> `when: __import__('os'), outside`
  ! 41:64: when does not parse: unexpected '('; conditions are made of options, and, or, not, ==, !=, <, <=, >, >=, in [..]
colocated: `when: param_offload, outside` -> `when: param_offload.real, outside`
  ! 41:67: when does not parse: unexpected character '.'; conditions are made of options, and, or, not, ==, !=, <, <=, >, >=, in [..]
colocated: `when: param_offload, outside` -> `when: true, outside`
  ! 41:54: when names no option; drop it, or name one
colocated: `when: param_offload, outside` -> `when: yes, outside`
  ! 41:54: when: no option is called 'yes'; options are: replica_size, param_offload, free_cache_engine, fence_scope
colocated: `when: param_offload, outside` -> `when: kv_cache, outside`
  ! 41:54: when: no option is called 'kv_cache'; conditions speak of options; for memory, use needs: or never:
colocated: `when: param_offload, outside` -> `when: replica_size, outside`
  ! 41:54: when: option 'replica_size' is neither true nor false; compare it with a number
colocated: `when: param_offload, outside` -> `when: fence_scope, outside`
  ! 41:54: when: option 'fence_scope' is neither true nor false; compare it, as in `fence_scope == replica`
colocated: `when: param_offload, outside` -> `when: fence_scope == wrld, outside`
  ! 41:69: when: option 'fence_scope' can never be 'wrld'; did you mean 'world'?
colocated: `when: param_offload, outside` -> `when: fence_scope < world, outside`
  ! 41:54: when: option 'fence_scope' has no order; use == or !=
colocated: `when: param_offload, outside` -> `when: param_offload == 1, outside`
  ! 41:54: when: option 'param_offload' (bool) is compared with 1 (int); compare values of one type
colocated: `when: param_offload, outside` -> `when: replica_size == two, outside`
  ! 41:70: when: option 'replica_size' is compared with 'two', no option; options are: replica_size, param_offload, free_cache_engine, fence_scope
colocated: `when: param_offload, outside` -> `when: replica_size < 1, outside`
  ! 41:5: nobody ever performs phase 'load_back'; its when: is false for all options; change or drop it [idle]
  ! 58:5: phase 'offload' releases trainer_params, which is not mapped; acquire it before [once]
colocated: `when: param_offload, outside` -> `when: {param_offload: true}, outside`
  ! 41:54: when is a mapping; write a condition over options
colocated: `when: param_offload, outside` -> `when: , outside`
  ! 41:53: when is nothing; write a condition over options
colocated: `{mapped: not param_offload}` -> `{mapped: not param_offlod}`
  ! 26:57: mapped of resource 'trainer_params': no option is called 'param_offlod'; did you mean 'param_offload'?
colocated: `{mapped: not param_offload}` -> `mapped`
  ! 26:44: start of resource 'trainer_params' is 'mapped', not a mapping; write {mapped: true}
colocated: `{mapped: not param_offload}` -> `{mapped: not param_offload, content: 1}`
  ! 26:72: unknown key 'content' in start of resource 'trainer_params'; keys are: mapped

## Groups, roles, resources, never

basic: `size: replica_size` -> `size: replica_sise`
  ! 5:40: size of group 'replica' is 'replica_sise'; write a number, at least 1, or an int option
basic: `size: replica_size` -> `size: 0`
  ! 5:40: size of group 'replica' is '0'; write a number, at least 1, or an int option
basic: `size: replica_size` -> `size: -2`
  ! 5:40: size of group 'replica' is '-2'; write a number, at least 1, or an int option
basic: `of: trainer` -> `of: trainers`
  ! 5:25: unknown role 'trainers'; did you mean 'trainer'?
basic: `size: replica_size` -> `size: replica_size, leader: last`
  ! 5:62: leader of group 'replica' cannot be 'last'; write `first`
basic: `groups:  {replica` -> `groups:  {world`
  ! 5:11: 'world' means something else here; give the group another name
  ! 8:20: place of role 'engine' is 'one per replica'; places are: device, world
  ! 8:20: role 'engine' is driven by a leader, of no group; write `one per GROUP`, whose leader drives it
  ! 21:37: scope of fence 'memory_released' cannot be 'replica'; without another group under `groups`, scopes are: world
  ! 22:52: acquires cannot reach 'replica'; places are: device, world, all
  ! 23:52: releases cannot reach 'replica'; places are: device, world, all
basic: `one per device}\n` -> `one per node}\n`
  ! 7:20: place of role 'trainer' is 'one per node'; places are: device, replica
basic: `one per device}\n` -> `two per device}\n`
  ! 7:20: place of role 'trainer' is 'two per device'; write `one per device`
basic: `one per device}\n` -> `one per replica}\n`
  ! 7:20: role 'trainer' acts, and has one rank per replica; write `one per device`; only a driven role spans a group
basic: `one per replica, driven_by: leader` -> `one per device, driven_by: leader`
  ! 8:20: role 'engine' is driven by a leader, of no group; write `one per GROUP`, whose leader drives it
basic: `driven_by: leader` -> `driven_by: follower`
  ! 8:48: driven_by of role 'engine' cannot be 'follower'; write `leader`
basic: `params:   {owner: trainer}` -> `params:   {owner: nobody}`
  ! 10:21: unknown role 'nobody'; roles are: trainer, engine
basic: `params:   {owner: trainer}` -> `params:   {}`
  ! 10:13: resource 'params' has no 'owner'; add `owner: ROLE`
basic: `params:   {owner: trainer}` -> `params:   {owner: trainer, size: 3}`
  ! 10:30: unknown key 'size' in resource 'params'; keys are: owner, content, start, dies
basic: `params:   {owner: trainer}` -> `params:   {owner: trainer}\n  params: {owner: trainer}`
  ! 11:3: 'params' is declared twice in resources; keep one of them
basic: `params:   {owner: trainer}` -> `params:   {owner: trainer, content: weights}`
  ! 10:39: content of resource 'params' cannot be 'weights'; write `version`
basic: `params:   {owner: trainer}` -> `params:   {owner: trainer}\n  spare: {owner: trainer}`
  ? 11:3: no phase touches resource 'spare'; use it, or drop it [idle]
basic: `[kv_cache, params]` -> `[kv_cache, parms]`
  ! 14:27: unknown resource 'parms'; did you mean 'params'?
basic: `[kv_cache, params]` -> `[kv_cache, kv_cache]`
  ! 14:27: 'kv_cache' is given twice; name different resources
basic: `[kv_cache, params]` -> `[kv_cache]`
  ! 14:16: never speaks of fewer than two resources; name two or more
basic: `[kv_cache, params]}` -> `[kv_cache, params], on: node}`
  ! 14:40: 'on' of never cannot be 'node'; choices are: device, elsewhere
basic: `[kv_cache, params]}` -> `[kv_cache, params], when: replica_size > 0}`
  ? 14:5: when: of this never is true for all options; drop it, or change it [idle]

## Phases and fences

basic: `- sync:        {uses: params}` -> `- sync`
  ! 18:5: a step is 'sync', not a mapping; write `sync: {}`
basic: `- sync:        {uses: params}` -> `- {}`
  ! 18:5: a step has no name; write `- NAME: {...}` or `- fence: NAME`
basic: `- sync:        {uses: params}` -> `- sync: uses params`
  ! 18:11: phase 'sync' is 'uses params', not a mapping; write {VERB: RESOURCE}
basic: `- sync:        {uses: params}` -> `- sync:\n    uses: params`
  ! 19:5: a step has a key beside its name; write `- NAME: {...}` or `- fence: NAME`
basic: `- sync:        {uses: params}` -> `- sync: {read: params}`
  ! 18:12: unknown key 'read' in phase 'sync'; keys are: by, acquires, releases, needs, uses, writes, fills, discards, ensures, when, outside, enqueued, retry, deadline_s
basic: `- sync:        {uses: params}` -> `- sync: {uses: {params: node}}`
  ! 18:27: uses cannot reach 'node'; places are: device, replica, all
basic: `- sync:        {uses: params}` -> `- sync: {uses: [params, params]}`
  ! 18:27: uses names 'params' twice; keep one of them
basic: `- sync:        {uses: params}` -> `- sync: {uses: []}`
  ! 18:18: uses names no resource; name one, or drop it
basic: `- sync:        {uses: params}` -> `- sync: {uses: parms}`
  ! 18:18: unknown resource 'parms'; did you mean 'params'?
basic: `- sync:        {uses: params}` -> `- sync: {uses: params, by: follower}`
  ! 18:30: by of phase 'sync' cannot be 'follower'; write `leader`
basic: `- sync:        {uses: params}` -> `- sync: {uses: params, outside: yes}`
  ! 18:35: outside of phase 'sync' is 'yes'; write true
basic: `- sync:        {uses: params}` -> `- sync: {uses: params, retry: always}`
  ! 18:33: retry of phase 'sync' cannot be 'always'; choices are: never, safe, after_query
basic: `- sync:        {uses: params}` -> `- sync: {uses: params, deadline_s: -1}`
  ! 18:38: deadline_s of phase 'sync' is '-1'; write seconds, more than 0, such as 300
basic: `- sync:        {uses: params}` -> `- sync: {uses: params, deadline_s: 1e400}`
  ! 18:38: deadline_s of phase 'sync' is '1e400'; write seconds, more than 0, such as 300
basic: `- sync:        {uses: params}` -> `- sync: {uses: params, deadline_s: 5 min}`
  ! 18:38: deadline_s of phase 'sync' is '5 min'; write seconds, more than 0, such as 300
basic: `- sync:        {uses: params}` -> `- sync: {ensures: params}`
  ! 18:21: ensures does not say what; write {NAME: start}
basic: `- sync:        {uses: params}` -> `- sync: {ensures: {params: gone}}`
  ! 18:30: what ensures names cannot be 'gone'; write `start`
basic: `- sync:        {uses: params}` -> `- sync: {uses: params, enqueued: true}`
  ! 18:5: phase 'sync' is enqueued and releases nothing; drop enqueued:, or say what it releases [idle]
basic: `- sync:        {uses: params}` -> `- offload: {uses: params}`
  ! 19:5: 'offload' is declared twice; rename one; the first is in line 18
basic: `- sync:        {uses: params}` -> `- memory_released: {uses: params}`
  ! 21:13: 'memory_released' is declared twice; rename one; the first is in line 18
basic: `phases:\n` -> `phases: []\nnever_:\n`
  ! 16:9: phases is empty; write a list of `- NAME: {...}`, or drop it
  ! 17:1: unknown key 'never_' in the file; did you mean 'never'?
basic: `fence: memory_released` -> `fence: plan`
  ! 21:13: 'plan' means something else here; give the fence another name
basic: `fence: memory_released` -> `fence: Memory released`
  ! 21:13: the fence's name is 'Memory released'; write a letter, then letters, digits and _ (64 at most)
basic: `scope: replica, deadline_s` -> `scope: replica_size, deadline_s`
  ! 21:37: scope of fence 'memory_released' is option 'replica_size', which holds no scope; an option that is a scope is an enum of: world, replica
basic: `scope: replica, deadline_s` -> `scope: node, deadline_s`
  ! 21:37: scope of fence 'memory_released' cannot be 'node'; without another group under `groups`, scopes are: world, replica
basic: `, deadline_s: 300` -> ``
  ! 21:13: fence 'memory_released' has no deadline_s; add `deadline_s: 300`
basic: `deadline_s: 300` -> `deadline_s: 0`
  ! 21:58: deadline_s of fence 'memory_released' is '0'; write seconds, more than 0, such as 300
basic: `deadline_s: 300` -> `timeout_s: 300`
  ! 21:13: fence 'memory_released' has no deadline_s; add `deadline_s: 300`
  ! 21:46: unknown key 'timeout_s' in a fence; keys are: fence, scope, deadline_s, first_deadline_s, requires, joined, when
basic: `[device_synchronised]` -> `[device_synchronized]`
  ! 21:74: fence 'memory_released' cannot require 'device_synchronized'; did you mean 'device_synchronised'?
basic: `[device_synchronised]` -> `device_synchronised`
  ! 21:73: requires of fence 'memory_released' is 'device_synchronised', not a list; write [device_synchronised]
basic: `[device_synchronised]` -> `[device_synchronised, device_synchronised]`
  ! 21:95: fence 'memory_released' requires 'device_synchronised' twice; keep one of them
basic: `[device_synchronised]` -> `[device_synchronised, free_bytes > 5]`
  ! 21:95: fence 'memory_released' cannot require 'free_bytes > 5'; did you mean 'free_bytes >= 1GiB'?
basic: `joined: outside` -> `joined: inside`
  ! 24:53: joined of fence 'rollout_over' cannot be 'inside'; write `outside`
basic: `joined: outside` -> `joined: outside, requires: [device_synchronised]`
  ! 24:72: fence 'rollout_over' is joined outside; drop requires: nobody can act before a join that the caller makes

## Order

basic: `{fence: memory_released, scope: replica, deadline_s: 300, requires: [device_synchronised]}` -> `sync_again: {}`
  ! 22:5: phase 'resume_kv' acquires kv_cache on every device of its replica, and no fence shows that every rank has ended 'offload', which releases params; put a fence of scope replica or world between them [unprotected-acquire]
basic: `, requires: [device_synchronised]` -> ``
  ! 21:13: fence 'memory_released' opens before the device has done what 'offload' only enqueued (it releases params); add `requires: [device_synchronised]` [unsynchronised]
basic: `{fence: rollout_over, deadline_s: 7200, joined: outside}` -> `tidy: {}`
  ! 17:5: phase 'train' acquires params on its device, and no fence shows that the leader has ended 'rollout', which releases kv_cache; put a fence of scope replica or world between them [unprotected-acquire]
  ! 21:13: the last fence 'memory_released' is of scope 'replica'; a failure reaches all ranks at the last fence: give it scope world [last-fence]
  ! 22:5: phase 'resume_kv' can fail after the last fence 'memory_released'; nobody would learn of it; put it before that fence [last-fence]
  ! 24:5: phase 'tidy' can fail after the last fence 'memory_released'; nobody would learn of it; put it before that fence [last-fence]
basic: `rollout_over, ` -> `rollout_over, scope: replica, `
  ! 24:13: the last fence 'rollout_over' is of scope 'replica'; a failure reaches all ranks at the last fence: give it scope world [last-fence]
basic: `{fence: rollout_over, deadline_s: 7200, joined: outside}` -> `{fence: rollout_over, deadline_s: 7200}\n  - tidy: {}`
  ! 25:5: phase 'tidy' can fail after the last fence 'rollout_over'; nobody would learn of it; put it before that fence [last-fence]
basic: `{uses: params}` -> `{uses: params, deadline_s: 400}`
  ! 21:13: fence 'memory_released' waits 300 s, less than the phases before it may take (sync 400 s); give it at least 400 s [deadline]
basic: `- sync:        {uses: params}` -> `- sync: {uses: kv_cache}`
  ! 18:5: phase 'sync' uses kv_cache, which is not mapped; acquire it before [mapped]
basic: `{acquires: [params, cache], outside: true}` -> `{acquires: cache, outside: true}`
  ! 18:5: phase 'sync' uses params, which is not mapped; acquire it before [mapped]
basic: `{releases: cache, enqueued: true}` -> `{}`
  ! 22:5: phase 'resume_kv' brings kv_cache and cache together on one device; release one of them before [never]
basic: `cache:    {owner: trainer}` -> `cache:    {owner: trainer, start: {mapped: true}}`
  ! 17:5: phase 'train' acquires cache, which is mapped already; release it before [once]
basic: `acquires: {kv_cache: replica}` -> `acquires: {kv_cache: all}`
  ! 22:5: phase 'resume_kv' acquires kv_cache on all devices, and no fence shows that every rank has ended 'offload', which releases params; put a fence of scope world between them [unprotected-acquire]
  ! 23:5: phase 'rollout' releases kv_cache on every device of its replica, and no fence shows that the leader has ended 'resume_kv', which acquires kv_cache; put a fence of scope world between them [unprotected]
basic: `{by: leader, acquires: {kv_cache: replica}}` -> `{acquires: {kv_cache: replica}}`
  ! 22:5: phase 'resume_kv' acquires kv_cache, which is mapped already; release it before [once]
  ! 23:5: phase 'rollout' releases kv_cache on every device of its replica, and no fence shows that every rank has ended 'resume_kv', which acquires kv_cache; put a fence of scope replica or world between them [unprotected]
basic: `{by: leader, releases: {kv_cache: replica}, outside: true}` -> `{needs: {kv_cache: replica}, outside: true}\n  - sleep: {by: leader, releases: {kv_cache: replica}}`
  ! 23:5: phase 'rollout' needs kv_cache on every device of its replica, and no fence shows that the leader has ended 'resume_kv', which acquires kv_cache; put a fence of scope replica or world between them [unprotected]
  ! 24:5: phase 'sleep' releases kv_cache on every device of its replica, and no fence shows that every rank has ended 'rollout', which needs kv_cache; put a fence of scope replica or world between them [unprotected]
colocated: `{mapped: not param_offload}` -> `{mapped: param_offload}`
  ! 41:5: phase 'load_back' acquires trainer_params, which is mapped already; release it before [once]
colocated: `when: free_cache_engine}\n  - {together: [kv_cache, train_cache], ` -> `}\n  - {together: [kv_cache, train_cache], `
  ! 42:5: phase 'train' brings rollout_weights and train_cache together on one device (with free_cache_engine=false); release one of them before [never]
colocated: `writes: {rollout_weights: replica}}` -> `needs: {rollout_weights: replica}}`
  ! 53:5: phase 'load' needs the new weights in rollout_weights, and it holds nothing where version 1 is needed; write or fill it before [content]
colocated: `    scope: replica\n    deadline_s: 300\n  - load:` -> `    scope: replica\n    deadline_s: 300\n    when: replica_size > 8\n  - load:`
  ! 54:5: phase 'load' uses staging on every device of its replica, and no fence shows that every rank has ended 'stage', which acquires staging; put a fence of scope replica or world between them [unprotected]
colocated: `, train_cache: start, staging: start` -> `, train_cache: start`
  ? 28:3: recover leaves staging as the failure left it; add `ensures: {staging: start}` to one of its phases [recover]
colocated: `retry: after_query}` -> `retry: after_query, outside: true}`
  ! 82:5: phase 'reclaim' is outside and has retry: after_query; drop retry:; your program repeats it [idle]
colocated: `fence: reclaimed` -> `fence: asleep`
  ! 83:12: 'asleep' is declared twice; rename one; the first is in line 74

## Roles and transitions

basic: `one per replica, driven_by: leader` -> `one per device`
  ! 17:3: 2 roles act, so phases must say whose they are; write `phases: {ROLE: [...]}` for: trainer, engine
basic: `phases:\n` -> `transitions: []\nphases:\n`
  ! 16:14: transitions is empty; write a list of {role: R, from: A, on: PHASE, to: B}, or drop it
  ! 18:3: phases is a list, not a mapping; write `phases: {NAME: {...}}`
basic: `phases:\n` -> `fences: {}\nphases:\n`
  ! 16:9: 'fences' goes with 'transitions' alone; put each fence where it stands, as `- fence: NAME`, in phases

## What must hold

basic: `phases:` -> `always: {}\nphases:`
  ! 16:9: always is a mapping, not a list; write a list of {together: [A, B], during: PHASE}
basic: `phases:` -> `always: [{together: [kv], during: resume_kv}]\nphases:`
  ! 16:22: unknown resource 'kv'; resources are: params, cache, kv_cache
basic: `phases:` -> `always: [{together: [kv_cache], during: resume}]\nphases:`
  ! 16:41: unknown phase 'resume'; did you mean 'resume_kv'?
basic: `phases:` -> `always: [{together: [kv_cache, kv_cache], during: resume_kv}]\nphases:`
  ! 16:32: 'kv_cache' is given twice; name different resources
basic: `phases:` -> `always: [{together: kv_cache, on: device}]\nphases:`
  ! 16:31: unknown key 'on' in an item of always; keys are: together, during, when
basic: `phases:` -> `always: [{together: kv_cache}]\nphases:`
  ! 16:10: kv_cache must always be mapped, and every epoch starts without; change start: of one, or when: of this line [always-in-start]
  ! 18:5: phase 'train' breaks always for kv_cache: always mapped, and now it is mapped: no; mend the order, or `always:` [always]
basic: `phases:` -> `always: [{together: kv_cache, during: resume_kv}]\nphases:`
  ! 23:5: phase 'resume_kv' breaks always for kv_cache: resume_kv runs where it is mapped: no; mend the order, or `always:` [always]
basic: `phases:` -> `always: [{together: kv_cache, during: resume_kv, when: replica_size < 1}]\nphases:`
  ! 16:10: this always: is false for all options, so it forbids nothing; change its when:, or drop it [idle]
basic: `phases:` -> `agree: [{content: kv_cache}]\nphases:`
  ! 16:9: an item of agree has no 'across'; add `across: ...`
basic: `phases:` -> `agree: [{content: kv_cache, across: group}]\nphases:`
  ! 16:37: unknown group 'group'; groups are: world, replica
basic: `phases:` -> `agree: [{content: kv_cache, across: replica}]\nphases:`
  ! 16:9: agree speaks of 'kv_cache', which has no content; give it `content: version`, or drop it here [reference]
basic: `phases:` -> `monotone: [{content: kv_cache, across: replica}]\nphases:`
  ! 16:32: unknown key 'across' in an item of monotone; keys are: content, when
basic: `phases:` -> `monotone: [{content: kv_cache}]\nphases:`
  ! 16:12: monotone speaks of 'kv_cache', which has no content; give it `content: version`, or drop it here [reference]
